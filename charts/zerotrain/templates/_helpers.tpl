{{/* Helm takes a value that is null, such as `keep:` with nothing after it, out of the defaults as well. What is missing
     then is off without a word: a network policy, a limit of samples, or what keeps jobs when the release goes. */}}
{{- define "zerotrain.needed" -}}
{{- range list "crds.enabled" "crds.keep" "admissionPolicy.enabled" "image.repository" "channelKey.entry"
  "serviceAccount.create" "rbac.create" "rbac.clusterReads" "rbac.userRoles" "podDisruptionBudget.enabled"
  "networkPolicy.enabled" "networkPolicy.dns.namespace" "monitoring.prometheusNamespace" "podMonitor.enabled"
  "podMonitor.interval" "podMonitor.sampleLimit" "podMonitor.labelValueLengthLimit" "podMonitor.bodySizeLimit"
  "serviceMonitor.enabled" "serviceMonitor.interval" "serviceMonitor.sampleLimit" "prometheusRule.enabled"
  "prometheusRule.jobs" "prometheusRule.runbookBaseUrl" "dashboards.enabled" }}
{{- $value := $.Values }}
{{- range splitList "." . }}{{ $value = get ($value | default dict) . }}{{ end }}
{{- if eq (toString $value) "" }}
{{- fail (printf "%s is null: give it a value, or leave it out for its default" .) }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Refuse a second operator where one of them is for the whole cluster: both would act on the same jobs. Who installs
     for single namespaces may not be allowed to ask, and neither may who leaves the rights to others. */}}
{{- define "zerotrain.alone" -}}
{{- $own := printf "%s/%s" .Release.Namespace (include "zerotrain.operator" .) -}}
{{- if and .Values.rbac.create (not .Values.watch.namespaces) -}}
{{- $spaces := list -}}
{{- range (lookup "rbac.authorization.k8s.io/v1" "ClusterRoleBinding" "" "").items -}}
{{- if include "zerotrain.isOperator" . }}{{ range .subjects }}{{ $spaces = append $spaces .namespace }}{{ end }}{{ end -}}
{{- end -}}
{{- range $space := $spaces | uniq -}}
{{- range (lookup "apps/v1" "Deployment" $space "").items -}}
{{- $found := printf "%s/%s" $space .metadata.name -}}
{{- if and (include "zerotrain.isOperator" .) (ne $found $own) }}
{{- fail (printf "watch.namespaces is empty, so this operator would look after the jobs of the whole cluster, and the operator %s does that, or looks after some of them: uninstall that one first, or give watch.namespaces to both, without common names" $found) }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether the object is part of an operator, of this chart or of deploy/kustomize. */}}
{{- define "zerotrain.isOperator" -}}
{{- $labels := .metadata.labels | default dict -}}
{{- if and (eq (get $labels "app.kubernetes.io/name") "zerotrain") (eq (get $labels "app.kubernetes.io/component") "operator") -}}
true
{{- end -}}
{{- end -}}

{{/* Names. The operator's own labels never depend on them: workers' NetworkPolicies select by the labels.
     What people name is quoted everywhere: namespaces and releases may be called 123, true or null. */}}
{{- define "zerotrain.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- $full = .Values.fullnameOverride | default $full | trunc 40 | trimAll "-" -}}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" $full) -}}
{{- fail (printf "give fullnameOverride: %q, from the release's name %q, cannot begin the name of a Service, which has lower-case letters, digits and dashes and begins with a letter" $full .Release.Name) -}}
{{- end -}}
{{- $full -}}
{{- end -}}

{{- define "zerotrain.operator" -}}
{{- printf "%s-operator" (include "zerotrain.fullname" .) -}}
{{- end -}}

{{/* First part of the names of cluster-scoped objects: releases for single namespaces may share a name. */}}
{{- define "zerotrain.clusterPrefix" -}}
{{- if .Values.watch.namespaces }}{{ .Release.Namespace }}-{{ end }}{{ include "zerotrain.fullname" . -}}
{{- end -}}

{{/* The same for objects in a namespace that is not the release's: (dict "root" $ "namespace" ...). */}}
{{- define "zerotrain.prefixIn" -}}
{{- if and .namespace (ne .namespace .root.Release.Namespace) -}}
{{- include "zerotrain.clusterPrefix" .root -}}
{{- else -}}
{{- include "zerotrain.fullname" .root -}}
{{- end -}}
{{- end -}}

{{- define "zerotrain.monitoringPrefix" -}}
{{- include "zerotrain.prefixIn" (dict "root" . "namespace" .Values.monitoring.namespace) -}}
{{- end -}}

{{- define "zerotrain.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "zerotrain.operator" .) -}}
{{- else -}}
{{- required "serviceAccount.name is needed when serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "zerotrain.keySecret" -}}
{{- .Values.channelKey.existingSecret | default (printf "%s-key" (include "zerotrain.operator" .)) -}}
{{- end -}}

{{- define "zerotrain.image" -}}
{{- .Values.image.repository -}}
{{- with .Values.image.digest }}@{{ . }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end -}}
{{- end -}}

{{/* Labels that pods are selected by: (dict "root" $ "component" "operator"). */}}
{{- define "zerotrain.selector" -}}
app.kubernetes.io/name: zerotrain
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* All labels: (dict "root" $ "component" ... "labels" (dict ...)); ours win. */}}
{{- define "zerotrain.labels" -}}
{{- $own := dict
  "app.kubernetes.io/name" "zerotrain"
  "app.kubernetes.io/instance" .root.Release.Name
  "app.kubernetes.io/component" .component
  "app.kubernetes.io/part-of" "zerotrain"
  "app.kubernetes.io/version" .root.Chart.AppVersion
  "app.kubernetes.io/managed-by" .root.Release.Service
  "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") -}}
{{- toYaml (mergeOverwrite (dict) (.root.Values.commonLabels | default dict) (.labels | default dict) $own) -}}
{{- end -}}

{{/* Metadata of one object: root, name, component; namespace ("-" is none), labels, annotations. */}}
{{- define "zerotrain.metadata" -}}
name: {{ .name | quote }}
{{- if ne (.namespace | default "") "-" }}
namespace: {{ .namespace | default .root.Release.Namespace | quote }}
{{- end }}
labels:
  {{- include "zerotrain.labels" . | nindent 2 }}
{{- with .annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Whether an object of the Prometheus operator is wanted: (dict "root" $ "enabled" ...). */}}
{{- define "zerotrain.monitored" -}}
{{- $enabled := toString .enabled -}}
{{- if or (eq $enabled "true") (and (eq $enabled "auto") (.root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) -}}
true
{{- end -}}
{{- end -}}

{{/* What every container of the chart's own may do: nothing. */}}
{{- define "zerotrain.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "zerotrain.podSecurity" -}}
runAsNonRoot: true
{{- if not (kindIs "invalid" .Values.operator.runAsUser) }}
runAsUser: {{ .Values.operator.runAsUser | int64 }}
runAsGroup: {{ .Values.operator.runAsUser | int64 }}
fsGroup: {{ .Values.operator.runAsUser | int64 }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Variables of the operator that the values set; what is unset is left to its defaults. */}}
{{- define "zerotrain.settings" -}}
{{- $dns := .Values.networkPolicy.dns -}}
{{- $dnsLabels := list -}}
{{- range $key := keys ($dns.labels | default dict) | sortAlpha }}{{ $dnsLabels = append $dnsLabels (printf "%s=%s" $key (get $dns.labels $key)) }}{{ end -}}
{{- /* The operator's own defaults stay unsaid. */ -}}
{{- $set := dict
  "DNS_NAMESPACE" (ternary "" $dns.namespace (eq $dns.namespace "kube-system"))
  "DNS_LABELS" (join "," $dnsLabels)
  "DNS_CIDRS" (join "," $dns.cidrs)
  "NAMESPACES" (join "," .Values.watch.namespaces)
  "MONITORING_NAMESPACE" .Values.monitoring.prometheusNamespace
  "EXTRA_EGRESS_CIDRS" (join "," .Values.jobs.extraEgressCidrs)
  "ALLOWED_EGRESS_CIDRS" (join "," .Values.jobs.allowedEgressCidrs)
  "EXTRA_HTTP_CIDRS" (join "," .Values.jobs.extraHttpCidrs)
  "IMAGE_PULL_POLICY" .Values.jobs.imagePullPolicy
  "RENDEZVOUS_TIMEOUT_SECONDS" .Values.jobs.rendezvousTimeoutSeconds
  "REFUSED_CREATION_SECONDS" .Values.jobs.refusedCreationSeconds
  "START_DEADLINE_SECONDS" .Values.jobs.startDeadlineSeconds
  "MAX_HOLD_OFF_SECONDS" .Values.jobs.maxHoldOffSeconds
  "WORKERS" .Values.operator.workers
  "RESYNC_SECONDS" .Values.operator.resyncSeconds
  "REQUESTS_PER_SECOND" .Values.operator.requestsPerSecond
  "REQUEST_BURST" .Values.operator.requestBurst -}}
{{- $found := list -}}
{{- range $name := keys $set | sortAlpha -}}
{{- $value := get $set $name -}}
{{- if kindIs "float64" $value }}{{ $value = ternary (int64 $value | toString) (toString $value) (eq (floor $value) $value) }}{{ end -}}
{{- if not (or (kindIs "invalid" $value) (eq (toString $value) "")) -}}
{{- $found = append $found (dict "name" (printf "ZEROTRAIN_OPERATOR_%s" $name) "value" (toString $value)) -}}
{{- end -}}
{{- end -}}
{{- if $found }}{{ toYaml $found }}{{ end -}}
{{- end -}}

{{/* Ports of the API server that the values give, as JSON. */}}
{{- define "zerotrain.givenApiServerPorts" -}}
{{- toJson (.Values.networkPolicy.apiServerPorts | default (list 443 6443)) -}}
{{- end -}}

{{/* Ports of the API server: the configured ones, and in an installation for the whole cluster those that it
     listens on. Who installs for single namespaces may not be allowed to ask. */}}
{{- define "zerotrain.apiServerPorts" -}}
{{- $ports := list -}}
{{- range include "zerotrain.givenApiServerPorts" . | fromJsonArray }}{{ $ports = append $ports (int .) }}{{ end -}}
{{- if not .Values.watch.namespaces -}}
{{- range (lookup "discovery.k8s.io/v1" "EndpointSlice" "default" "kubernetes").ports -}}
{{- $ports = append $ports (int .port) -}}
{{- end -}}
{{- end -}}
{{- range $index, $port := $ports | uniq }}
{{- if $index }}
{{ end -}}
- protocol: TCP
  port: {{ $port }}
{{- end -}}
{{- end -}}
